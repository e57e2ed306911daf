"""A run to look at: a local web page, the same page as one file, and trajectories in the terminal.

    store, metrics.jsonl ──► answers (plain JSON) ──► web.py           a server for mua view
      viewed_runs.py         run_overview.py     ├──► single_file.py   mua view --export: all answers in one page
                             trajectory_lists.py │
                             one_trajectory.py   └──► terminal.py      mua show
                             run_comparison.py

What is answered is made in Python and escaped by the page's library; nothing here writes into a store.
"""
