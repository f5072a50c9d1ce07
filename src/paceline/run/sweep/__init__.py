"""Many runs of one job: `paceline sweep`.

Read `sweep.py` first. `space.py` makes the combinations of values, `results.py` compares their runs, and `on_ray.py`
hands the runs to Ray Tune. Nothing here draws: the table is in `cli/sweep.py`, the page in `report/sweep_page.py`.
"""
