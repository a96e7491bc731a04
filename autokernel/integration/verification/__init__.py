"""The model with its kept kernels against the model without: the same outputs, and how much faster, end to end.

sides.py     ways to run a model, timed in turns, in child processes
parity.py    is it still itself
processes.py, fork_server.py   the processes in which it runs, and what they are forked from
notes.py     what was found so far, if it is interrupted
trial.py     verify(): which kernels are used, and what the model gains
record.py    what was found, for machines and for people: which form of the model is to be deployed
forms.py     the forms that there are, and the code for each
winners.py   the kernels of a run, read from git
traces.py    a pass before and after, for a browser's viewer
proven.py    the kernels that paid in any model of this machine
"""
