"""Training by many workers, emulated: real gradients of the real model, in virtual time.

A discrete-event simulation says who computes and sends what when; a tape has the arithmetic done
in that order. Timing is plain arithmetic (`cluster`, `servers`, the algorithms), and needs no JAX;
`arithmetic` does what the tape says, with the parts of the real `Step`.
"""
