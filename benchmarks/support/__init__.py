"""What several benchmarks share; no benchmark itself.

nets        models of parameters and next to no arithmetic, with the data of a step
models      well-known models with their arithmetic
ranks       rank processes, and the result of rank 0
links       a network of ranks with a limited rate
wire        a modelled network for one GPU
copies      ways to flatten and to unflatten
baselines   who is measured: minidp, torch's variants, training without either
rounds      implementations measured step by step in turn, gradients compared
bound       the least time of a step, from when its gradients came
memory      peak memory of an implementation
estimates   medians of paired differences and ratios, with intervals
comparison  one measurement of overhead as a table and as JSON
exposure    one measurement of exposed communication as a table and as JSON
weak        one measurement of weak scaling as a table and as JSON
verdicts    targets, met or missed
bars        several as a chart
simulation  a step on many ranks, as events; what collectives cost
workloads   when gradients of real models would be ready
scale       a model on growing simulated clusters, as a table
published   what others measured, beside simulations of it
validation  predicted steps beside measured ones
waits       the model that is measured there: it waits on the clock
scale_chart  all of it as a chart
stacks      several as a chart of stacked bars
pairs       several as a chart of two dots in a row
curves      several as a chart of lines
progress    a bar on the terminal
report      header, console, files
output      where files go, small pictures, what is said of wrong gradients
"""
