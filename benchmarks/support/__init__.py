"""What several benchmarks share; no benchmark itself.

nets        the models, with the data of a step
ranks       rank processes, and the result of rank 0
copies      ways to flatten and to unflatten
links       a network of two ranks with a limited rate
rounds      implementations measured step by step in turn, gradients compared
estimates   medians of paired differences and ratios, with intervals
comparison  one measurement as a table and as JSON
verdicts    targets, met or missed
bars        several as a chart
simulation  a step on many ranks, as events; what collectives cost
workloads   when gradients of real models would be ready
scale       a model on growing simulated clusters, as a table
published   what others measured, beside simulations of it
validation  predicted steps beside measured ones
waits       the model that is measured there: it waits on the clock
scale_chart  all of it as a chart
report      header, console, files
"""
