"""Pages about a run, a benchmark, a plan or links; they open offline.

Read `page.py` first (what every page is made of), then `run_view.py` and its template.
"""
