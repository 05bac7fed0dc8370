"""Groups of the rank processes of an attempt: connection, collectives and their failures.

process_group   the ranks of a training of `init`
control_group   those of a script that communicates by itself, for control values only
generation      a process group with a fixed list of members
group_forming   process groups formed beside a running one
nccl_groups     such groups on GPUs: connected ahead, aborted when a member is lost
group_guard     waits for collectives of a group whose members may be lost
link_errors     errors of one line
torch_compat    differences between releases of torch
"""
