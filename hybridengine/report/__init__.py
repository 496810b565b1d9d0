"""A run as one HTML page that needs no network: `hybridengine report runs/NAME`.

run_record.py   what a run's folder holds, and what is missing or damaged
figures.py      the table of figures, and how they are drawn
colours.py      colours that people tell apart, the same phase always in the same one
page.py         facts, figures, samples and configuration as HTML, in page.html
"""
