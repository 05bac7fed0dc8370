"""Output of sacct for a small run of the demo."""

ROWS = """\
5|gpt|alice|REQUEUED|0:0|100|102|135|billing=4,cpu=4,gres/gpu:a100=4,gres/gpu=4,mem=2000M,node=1|g01|00:00:00
5|gpt|alice|REQUEUED|0:0|135|139|160|billing=4,cpu=8,gres/gpu:a100=8,gres/gpu=8,mem=4000M,node=2|g[01-02]|00:00:00
9|train|bob|COMPLETED|0:0|159|161|300|billing=1,cpu=1,gres/gpu:a100=4,gres/gpu=4,mem=500M,node=1|g01|00:00:00
5|gpt|alice|REQUEUED|0:0|160|164|180|cpu=4,gres/gpu:a100=4,gres/gpu=4,node=1|g02|00:00:00
10|urgent|bob|COMPLETED|0:0|178|181|195|cpu=1,gres/gpu:a100=4,gres/gpu=4,node=1|g02|00:00:00
5|gpt|alice|COMPLETED|0:0|180|197|250|cpu=4,gres/gpu:a100=4,gres/gpu=4,node=1|g02|00:00:00
6|vit|alice|REQUEUED|0:0|100|102|140|cpu=2,gres/gpu:v100=2,gres/gpu=2,node=1|g05|00:00:00
6|vit|alice|CANCELLED by 2001|0:15|140|144|150|cpu=2,gres/gpu:v100=2,gres/gpu=2,node=1|g03|00:00:00
7|never|alice|CANCELLED by 2001|0:0|100|None|150||None assigned|00:00:00
"""
