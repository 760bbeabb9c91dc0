"""Many runs compared honestly: a study file names them, processes run them, a table compares them.

study_file.py   a study file as typed data, and its mistakes;  points.py  rows of a search
plan.py         the runs of a study: checks of all rows, commands and digests
folder.py       the folder of a study: its index, and what may change later
executor.py     runs what is missing, in any number of processes
outcomes.py     the state of a run;  ensembles.py  trained nets scored as one
table.py        outcomes as a table: means, intervals, tests; `printing.py` shows it
"""
