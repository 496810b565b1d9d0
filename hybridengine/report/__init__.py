"""Report of a run as one self-contained HTML page: `hybridengine report runs/NAME`.

run_record.py   contents of a run's folder, with notes on missing or damaged files
figures.py      table of the figures, and functions that draw them
colours.py      distinguishable colours, the same for a phase in every figure
page.py         facts, figures, samples and configuration as HTML (template page.html)
"""
