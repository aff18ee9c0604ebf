"""What decides: plain Python, no I/O, no clock, no sentence. Start reading at messages.py, then ledger.py.

messages         events in, actions out: all that crosses a boundary
ledger           what an event leads to: whose turn, which attempt
roster           the workers, each in its phase
dispatch         the tasks on their way: which worker holds which, and which one gets the next
inquest          what a death says about the task it fell on: guilty, or only unlucky
restart_budget   how many deaths and how many bad samples are too many
autoscale        how many workers there should be
host             the contract with whoever owns the processes
supervisor       the loop: wait, tell the ledger, act; the log of events and its replay
"""
