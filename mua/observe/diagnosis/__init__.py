"""Whether a run is healthy, and if not, what happened first: ``mua diagnose`` and the alarms of training.

metrics.jsonl ─┐                              ┌─► causes.py ─► verdict.py ─► text or JSON
store ─────────┴─► mua/view/run_evidence.py ─► Evidence
a step's metrics, in the trainer's loop ─► Alarms (verdict.py) ─► one line in the log
"""
