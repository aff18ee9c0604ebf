"""Why it happened: a Case in, a Finding out. finding.py asks the rules, report.py tells people."""
