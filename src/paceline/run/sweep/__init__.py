"""Many runs of one job: `paceline sweep`.

Read `sweep.py` first. `space.py` makes the combinations of values, `results.py` compares their runs, and `on_ray.py`
hands the runs to Ray Tune. Tables and pages are elsewhere: in `cli/sweep.py` and `report/sweep_page.py`.
"""
