"""The job state machine of one node: events in, instructions out (design D5, D9-D11).

``JobMachine`` (machine.py) hands each event to the part that owns it:

joining     local ranks stand at restore(): report to the steward-elect, repeat until answered
opening     the epoch as this node knows it: persist, fetch, vote, load
uplink      the session with the steward: every fact in order, repeated until heard
capture     grants become slots of local ranks, and back
slots       what this daemon's memory holds, pins, releases
replicate   copies of what we hold on other nodes
levels      what the steward certified, and what may go because of it
writing     our share of a flush
steward/    speaks for the job where rank 0 lives, or where the succession says
"""
