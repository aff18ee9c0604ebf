"""spawn: N ranks at once. The first failure is named, the rest are stopped, and all start again if the policy says so.

cause          which of several failures is the cause; the errors that spawn raises
phases         when a group of ranks is stopped: its phases, and the allowed moves between them
rank_main      the rank's side: what travels to it, what it sets up before the user's function, and its last words
rank_process   how a rank's process starts, by each start method, and how it is reaped
output         what ranks print: shown live, in files, and the last lines
rank_life      what the trainer holds of one rank: its process, its last words, the evidence of its end
rank_group     one attempt: all ranks started, watched and stopped
rank_narrator  what the user is told: findings, incidents and errors about ranks
attempts       spawn itself, what it gives back, the environment of a rank, and one attempt after another
elastic        under torchrun: error files with our findings, also for a rank that was killed

An import points one way: a module imports only from those above it.
"""
