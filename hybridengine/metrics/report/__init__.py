"""A run as one HTML page that needs no network: `hybridengine report runs/NAME`.

run_record.py      what a run's folder holds, and what is missing or damaged
blocks.py          parts that sections are made of: charts, tables, samples, text
charts.py          lines, stacked bars and rows of bars, drawn with bokeh
colours.py         colours that people tell apart, the same phase always in the same one
curves.py          sections: evaluation, training curves, memory
phases.py          section: where the time of a step goes
transfers.py       section: bytes along every edge of the dataflow
timeline_rows.py   section: what every rank did in the last steps
samples.py         section: prompts, responses and scores
page.py            all sections, in order, as HTML
template.py        the page's frame and style
"""
