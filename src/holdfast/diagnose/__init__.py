"""Why it happened: a Case goes in, a Finding comes out, and people read it as an incident.

finding          Case, Finding, Rule, and the order in which rules are asked
rules/           the functions from a Case to a Finding
  deaths           a process ended or was sent a signal: by itself, or by somebody else?
  hang             a worker does not go on: what does it wait for?
  resources        memory, descriptors, processes or space ran out
  data             the dataset raised an exception
incident         words one case as one incident
report           incidents and totals as text and as JSON
stats            the totals of a loader or a pool, as records
narrator         turns what happened to workers into incidents, and collects them; each face has its own
run_folder       keeps incidents and totals in a folder, for its user alone
run_reader       joins what trainer and keepers wrote there, and diagnoses what has no verdict
pages/           what each finding means: `holdfast explain NAME`

foreign_logs     finds the causes in a log that others wrote
logs/            what the lines of such logs look like
  torch            torch's DataLoader, and the launchers of ranks
  clusters         schedulers, containers, Ray, Spark
  system           the kernel, and the error texts of the system
  own              Holdfast's own errors and log lines

machine_checks   checks the machine before a run
machine          what this machine grants: processors, memory, limits
libraries        checks the libraries of this process
fitness          checks a dataset by what loading some samples showed
forecast         how much memory a run will need, and which settings fit
"""
