"""Training by many workers, emulated: real gradients of the real model, in virtual time.

A discrete-event simulation determines when each worker computes and sends, and an instruction log
executes the computations in that order. Timing (`virtual_cluster`, `parameter_servers`, the
algorithms) needs no JAX; `executor` runs the instructions with the parts of the real `Step`.
"""
