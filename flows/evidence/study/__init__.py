"""`turnwise study FILE`: methods over tasks and seeds as ordinary runs, tuned alike, and what they say together. No learning.

Modules:

    design    a study as its file says it, and what is unfair in it
    sweep     a study of all combinations of values that a command line lists
    cells     the runs that a study is made of: what is tuned, what is chosen, which of them are finished
    elsewhere rows of runs that finished in another folder, and when they stand for a cell
    children  runs cells as child processes, some at a time
    finish    which cells are finished, and all of a study: tune, choose, run, keep
    rows      what is kept of a finished run: one line of JSON
    figures   means with intervals, paired differences, win rates at equal cost, cost of a win rate
    tables    the tables of the report
    page      the report as HTML and Markdown, its curves as SVG
    keep      the study's own run in MLflow, with the report as artifacts
"""
