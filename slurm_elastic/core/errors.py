"""The base of all exceptions of this package, so that a caller can catch one class.

    SlurmElasticError
    ├── CliError                        cli.exit_codes
    ├── InstallationError               cli.installation.installed_files
    ├── TrainingError                   controller.lengths.training_process
    ├── MetricsError                    controller.metrics.metrics_service
    ├── NoAnswerError                   controller.queries.view
    ├── QueueFullError                  controller.server.fair_queue
    ├── RequestAuthError                controller.server.request_auth
    ├── RequestRefusedError             controller.server.request_dispatcher
    ├── LedgerError                     controller.state.ledger
    ├── InvalidInputError               core.errors
    │   ├── ConfigError                 config.section_reader
    │   ├── DirectiveError              core.directive_grammar
    │   ├── ExecutionPlanError          core.execution.execution_plan
    │   ├── SupportedOptionsError       core.execution.supported_options
    │   ├── LayerError                  core.layers
    │   ├── LayoutTextError             core.layout
    │   ├── MemberOrdersError           core.member_orders
    │   ├── ReportError                 core.report_fields
    │   ├── SpatialCutError             core.slab_grid
    │   ├── SubmissionError             core.submission
    │   ├── CommunicationError          models.communication
    │   ├── PipelineError               models.pipedream.partitioner
    │   │   └── ArgumentError           models.pipedream.partitioner
    │   ├── LayerProfileError           models.pipedream.profile_reader
    │   ├── VolumeNetworkError          models.spatial.network_file
    │   ├── TimersError                 placement.delay.timers
    │   ├── PolicyError                 policies.policy_protocol
    │   ├── ExtrapolationError          profiler.extrapolate
    │   ├── ProfileFileError            profiler.profile_file
    │   ├── ComparisonError             profiler.profile_merge
    │   ├── StoreError                  profiler.profile_store
    │   ├── PlanError                   profiler.profiling_plan
    │   ├── NoConfigurationError        profiler.recommendation
    │   ├── NotMeasuredError            profiler.stalls
    │   ├── PlotError                   simulator.plots
    │   ├── SimulationError             simulator.simulation
    │   ├── NeighbourSlowdownError      simulator.truth.neighbour_slowdown
    │   ├── RestartCostError            simulator.truth.restart_costs
    │   ├── SacctError                  simulator.workloads.accounting_row
    │   ├── ApplicationProfileError     simulator.workloads.application_profiles
    │   ├── ClusterError                simulator.workloads.cluster_text
    │   ├── GenerateError               simulator.workloads.generate
    │   ├── InputFileError              simulator.workloads.input_lines
    │   ├── ScalingError                simulator.workloads.scaling_curves
    │   ├── WorkloadError               simulator.workloads.workload
    │   ├── TopologyError               topology
    │   ├── UnsavableObjectError        training.checkpoint.object_state
    │   ├── LoaderError                 training.loop.elastic_loader
    │   ├── UnsupportedTrainingError    training.init_arguments
    │   ├── LoopError                   training.loop.loop_arguments
    │   └── LayoutError                 training.pipeline.stage_layout
    ├── CompanionChannelError           job.companions.companion_channel
    ├── CompanionRefusedError           job.companions.companion_submission
    ├── SecondEsrunError                job.environment.sole_esrun
    ├── EsbatchError                    job.esbatch
    ├── UsageError                      job.esrun_options
    ├── LauncherError                   job.launchers.adaptation
    ├── AllocationError                 job.slurm_env
    ├── CopyStoppedError                job.unmodified.checkpoints.checkpoint_files
    ├── KeepError                       job.unmodified.kept_checkpoint
    ├── ChannelError                    rpc.frames
    │   ├── ConfigurationReadError      rpc.frames
    │   ├── ControllerUnreachableError  rpc.frames
    │   ├── ControllerUntrustedError    rpc.frames
    │   └── RequestRejectedError        rpc.frames
    ├── SealError                       rpc.munge_auth
    │   ├── MungeError                  rpc.munge_auth
    │   └── UnsealError                 rpc.munge_auth
    ├── SolverFailedError               policies.milp.pulp_backend
    ├── SolverUnavailableError          policies.milp.pulp_backend
    ├── RequestError                    rpc.protocol
    ├── RunError                        simulator.parallel_runs
    ├── AccountingError                 slurm.accounting
    ├── NotActiveError                  slurm.scontrol
    ├── ScontrolError                   slurm.scontrol
    │   └── SlurmUnreachableError       slurm.scontrol
    ├── CheckpointError                 training.checkpoint.checkpoint_coordinator
    ├── ShardError                      training.checkpoint.shards
    ├── LinkError                       training.ranks.link_errors
    ├── GroupBrokenError                training.ranks.group_guard
    └── UnequalWeightsError             training.loop.step_boundary

An `InvalidInputError` is also a ValueError; CheckpointError, LinkError and ShardError, which
training scripts may see, are also RuntimeErrors. Standard library only.
"""


class SlurmElasticError(Exception):
    """Base of every exception of this package; its text is one line that names the culprit."""


class InvalidInputError(SlurmElasticError, ValueError):
    """A text, file, option or message from outside that cannot be used."""
