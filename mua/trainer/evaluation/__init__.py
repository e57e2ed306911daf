"""Evaluating a policy: episodes over any domains, kept as they end; estimates, reports, and comparisons of two runs.

::

    run ──► store (what is done already) ──► episodes ──► store ──► summary ──► report, plots, evaluation.json
                                                                                              │
                                                              two of those ──► compare ◄──────┘
"""
