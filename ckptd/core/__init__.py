"""Pure values and decisions: no I/O, no clock, no thread, no torch (design D5).

state_map   what the state is, and where its bytes lie
redundancy  how snapshots outlive nodes
pacing      how fast bytes may move beside training
protocol    how daemons agree about one job
"""
