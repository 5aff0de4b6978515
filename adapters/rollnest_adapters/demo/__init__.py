"""`rollnest demo`: a small policy learns arithmetic through the engine, on two CPU cores, in minutes.

task         prompts and judger, from reasoning-gym
policy       a small Llama, and a short supervised start; or a model from a directory
tokenizer    the small Llama's
evaluation   greedy accuracy, outside the engine
train        GRPO: a plain training loop that sees data only through `Batch`
record       what a run measured
saved        the run's own checkpoint: policy, optimizer and engine of one moment
progress     the live display and the closing tables
report       the HTML report
run          how the parts fit together
"""
