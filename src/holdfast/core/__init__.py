"""Decides; stdlib only, no I/O, no clock. Start reading at messages.py, then ledger.py.

messages         events in, actions out: all that crosses a boundary
ledger           what an event leads to: whose turn, which attempt
roster           which tasks are on their way, and which workers there are, each in which life
dispatch         who holds which task, and who gets the next one
inquest          what a death says of the task it fell on: guilty, or only unlucky
restart_budget   how many deaths and how many bad samples are too many
autoscale        how many workers there should be
host             the contract with whoever owns the processes
supervisor       the loop: wait, tell the ledger, act; the log of events and its replay
"""
