"""A run to look at: a local web page, the same page as one file, and trajectories in the terminal.

    store, metrics.jsonl ──► answers (plain JSON) ──► web.py        a server for mua view
      viewed_runs.py         run_overview.py     ├──► html_page.py  mua view --export: all answers in one page
                             trajectory_lists.py │
                             one_trajectory.py   └──► terminal.py   mua show
    the same ──► run_evidence.py, user_leaks.py ──► mua.observe.diagnosis: mua diagnose

What is answered is made in Python and escaped by the page's library; nothing here writes into a store.
"""
