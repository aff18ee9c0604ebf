"""spawn: N ranks at once; the first failure is named, the rest are stopped, and all start again if the policy says so.

cause.py        decides, purely, which of several failures is the cause
errors.py       RankExited, RankRaised: also torch's own
parcel.py       the function and its arguments on their way into a new process
birth.py        how a rank's process starts, by each start method, and how it is reaped
rank.py         the rank's side: what it sets up before the user's function, and its last words
output.py       what ranks print: live, in files, and the last lines
surround.py     the environment of a rank: rendezvous, threads; and do that many fit here?
life.py         what the trainer holds of one rank: its process, last words, evidence
group.py        one attempt: watched, its first failure noticed, the others stopped
tell.py         failures become incidents and exceptions
attempts.py     spawn itself, what it gives back, and one attempt after another
elastic.py      the same findings in torchrun's error files; witness.py writes them for a rank that was killed
"""
