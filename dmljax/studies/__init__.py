"""Many runs compared honestly: a study file says which, workers make them, a table says the rest.

study_file.py   a study file as typed data, and what is wrong with it
plan.py         the runs of a study: their commands and digests
folder.py       the folder of a study: its index, and what may change later
worker.py       the loop that makes runs; `launch.py` starts several of it
outcomes.py     what became of a run
table.py        outcomes as a table: means, intervals, tests; `formats/` prints it
"""
