"""Metrics of a run: a row per step on disk, a line per step on the console, a table at the end.

keys.py              the names of the metrics that others rely on
recorder.py          rows to metrics.jsonl and TensorBoard
rows.py              rows and other lines of JSON, read back
trackers.py          rows to Weights & Biases and MLflow, in the background
samples.py           responses of an evaluation as lines of JSON and as tables
summary.py           the rows of a whole run in a few numbers
console.py           rows and summary as text
live.py              how far a run is and what every role is doing, as a view at the bottom of the terminal
formatting.py        bytes and seconds as text
group_text.py        groups of ranks as text
timeline.py          what every rank did when
measured_run.py      what a run has taken, as plans count it
report/              a run as one HTML page
"""
