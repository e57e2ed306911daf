"""What a run leaves behind: metrics, traces, progress, and views of them. Imports nothing heavy."""
