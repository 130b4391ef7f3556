"""`turnwise study FILE`: compares equally tuned methods over tasks and seeds. Its runs are ordinary runs. No learning.

Modules:

    design    reads a study's file, and refuses unfair comparisons
    sweep     a study of all combinations of the values on a command line
    cells     the runs of a study: tuned settings, chosen settings, finished runs
    elsewhere rows of runs from another folder, and when they replace a cell
    children  runs cells as child processes, some at a time
    finish    runs a whole study: finds finished cells, tunes, chooses, runs, stores
    rows      the stored line of JSON of a finished run
    figures   means with intervals, paired differences, win rates at equal cost, cost of a win rate
    tables    the tables of the report
    page      the report as HTML and Markdown, its curves as SVG
    keep      the study's own run in MLflow, with the report as artifacts
"""
