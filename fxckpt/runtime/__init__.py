"""Runtime: the transfer operators and the places activations go to. Nothing else touches streams, files or threads.

ops        the operators of rewritten graphs
store      what one transformed model has under way: finds the tier, measures, tells errors
transfer   one activation's way out and back, and the handle that a graph holds of it
stats      bytes, seconds and high-water marks of a step
tier       what a place has to offer; host, cuda, disk: the places
pool       pinned host memory that is used again
file       a file without a name, with room that is used again
"""
