"""What a run tells: a row per step on disk, a line per step on the console, a table at the end.

keys.py              the names of the metrics that others rely on
recorder.py          rows to metrics.jsonl and TensorBoard, and back
trackers.py          rows to Weights & Biases and MLflow, in the background
tracker_packages.py  how these packages are spoken to
samples.py           responses of an evaluation as lines of JSON and as tables
summary.py           what a whole run's rows amount to
console.py           rows, samples and summary as text
live.py              how far a run is and what every role is doing, as a view at the bottom of the terminal
formatting.py        bytes and seconds for people
timeline.py          what every rank did when
report/              a run as one HTML page
"""
