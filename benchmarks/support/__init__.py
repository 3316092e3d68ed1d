"""Code that several benchmarks share. Nothing here is a benchmark itself.

models      what is trained: models, their sizes, the data of one step
ranks       start rank processes, return the result of rank 0
links       connect the ranks by links with a limited rate
baselines   what is compared: minidp, torch's DDP, one all-reduce, no communication
rounds      measure implementations step by step in turn, compare their gradients
bound       the shortest possible time of a step, from when its gradients were ready
estimates   medians of paired ratios and differences, with intervals
report      command line, header, tables, targets, result files
charts      bar charts and line charts
"""
