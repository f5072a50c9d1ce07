"""Many runs of one job: `paceline sweep`.

Read `sweep.py` first. `space.py` creates the combinations of values, `results.py` compares their runs, and `on_ray.py`
runs a sweep on Ray Tune. Tables are in `cli/sweep.py`, and pages in `report/sweep_page.py`.
"""
