"""Decides; stdlib only, no I/O, no clock. Start reading at messages.py, then ledger.py.

messages     events in, actions out: all that crosses a boundary
ledger       what an event leads to: whose turn, which attempt
task         one batch on its way, and its past
roster       which workers there are, in which life, and who is at work
hands        who holds which task, and who gets the next one
rotation     workers that take turns by their number: round robin, streams
inquest      what a death says of the task it fell on
blame        guilty, or only unlucky: the arithmetic
patience     the restart budget
breaker      too many bad samples to go on
crew         how many workers there shall be
host         the contract with whoever owns the processes
supervisor   the loop: wait, tell the ledger, act
story        the log of events; replay
"""
