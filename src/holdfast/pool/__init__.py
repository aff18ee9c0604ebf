"""The Pool: a concurrent.futures.Executor whose workers may die.

executor        Pool, as users see it
call            one call on its way: its limits, and the future that waits for it
call_codec      what a worker is told of a call, pickled
dispatcher      the pool's one thread: it runs the supervisor
settle          results, failures and deaths become outcomes of futures
pool_narrator   the words: lost tasks and failures become exceptions
mapping         map(): several items as one task, results in their order
progress        how far a map() is; totals for `holdfast top`
pool_job        what a worker of a pool does
"""
