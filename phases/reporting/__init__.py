"""`kd report`: what kept evidence says, on one page and in the terminal.

    kept.py         what is kept, read once, and whether it is current
    model.py        what a report is made of: sections of tables, plots and gaps
    gates, kernel, service, profiles, slots, experts, decisions, unmeasured .py
                    a section each: dataclasses out of what is kept
    gather.py       all of them
    scales.py, svg.py, plot_*.py
                    plots as inline SVG
    page.py, page.css, elements.py
                    the page
    terminal.py     the same in a terminal

Nothing here runs a gate, and no figure stands in the code: each comes from a kept file or, where
it is called a prediction, from a model.
"""
