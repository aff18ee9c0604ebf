"""The Pool: a concurrent.futures.Executor whose workers may die. executor.py is what the user sees."""
