"""Metrics of a run while it trains, and its report.

keys.py         names of the metrics that other rooms rely on
recorder.py     rows to metrics.jsonl and TensorBoard
step_rows.py    rows and other lines of JSON, read back
trackers.py     rows to Weights & Biases and MLflow, in the background
samples.py      responses of an evaluation as lines of JSON and as tables
console.py      rows as text: a line per step, a table at the end
live.py         progress of a run and of every role, at the bottom of the terminal
timeline.py     spans of every rank's calls
figures.py      table of the figures, and functions that draw them
page.py         contents of a run's folder, and its report as HTML: `hybridengine report runs/NAME`
"""
