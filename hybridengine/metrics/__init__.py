"""What a run tells: a row per step on disk, a line per step on the console, a table at the end.

keys.py        the names of the metrics that others rely on
timing.py      seconds per phase of a step
recorder.py    rows to metrics.jsonl and TensorBoard, and back
summary.py     what a whole run's rows amount to
console.py     rows and summary as text
formatting.py  bytes and seconds for people
"""
