"""Each `fix=` of the package, and the test that follows what it says; or why there is none.

A key is the module, the function, and how the text begins. The test meets the error and then does what it says;
of advice about ranks and other libraries it may be one whose program does so from the start. `Untried` says why
there is none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Untried:
    """Why no test follows a way out."""

    why: str


STEPS = "tests/test_ways_out_of_steps.py::test_"
WINDOWS = "tests/test_ways_out_of_windows.py::test_"
SHARDS = "tests/test_ways_out_of_shards.py::test_"
FAULT = Untried("a fault of the package: no step is known that has it")
ARTIFACT = "tests/test_artifact.py::test_"
RESHARDED = "tests/test_resharded_windows.py::test_"
FLOATS = "tests/capture/test_float_inputs.py::test_"
DRAWN = "tests/capture/test_drawn_numbers.py::test_"
REBOUND = "tests/capture/test_rebound.py::test_"
WAYS_OUT: dict[str, str | Untried] = {
    "capture/rebound.py:_refusal write into the tensor th": REBOUND
    + "containers_made_anew_are_refused_with_their_line",
    "capture/rebound.py:check_rebound write into the tensor th": REBOUND
    + "windows_of_their_own_are_refused",
    "eager/rebound.py:put_back change it in place, afte": REBOUND
    + "a_count_that_is_made_anew_is_refused_eagerly",
    "capture/numpy_draws.py:refuse_numpy_draw draw with torch (torch.r": STEPS + "numbers_of_numpy",
    "capture/explained.py:_attached return it detached (loss": "tests/capture/test_explained.py::test_"
    + "an_object_with_an_attached_loss_is_named",
    "capture/explained.py:_too_many keep a number that chang": FLOATS
    + "too_many_captures_are_named_and_a_tensor_is_the_way_out",
    "capture/drawn_numbers.py:_of_python draw with torch (torch.r": DRAWN
    + "what_no_program_can_do_is_refused",
    "capture/drawn_numbers.py:_refuse_unseeded make it before the step": DRAWN
    + "a_generator_without_a_seed_is_refused",
    "capture/drawn_numbers.py:check_draws let one draw decide for": DRAWN
    + "too_many_ways_are_refused",
    "capture/drawn_numbers.py:_refuse_constant compute with it by tenso": DRAWN
    + "a_constant_of_the_program_is_refused",
    "runtime/artifact.py:write_artifact leave TORCHINDUCTOR_FORC": ARTIFACT + "refusals",
    "runtime/artifact.py:load_artifact leave it out once, call": ARTIFACT + "refusals",
    "runtime/export.py:export leave backend out": ARTIFACT + "refusals",
    "runtime/other_ranks.py:taken_over load it with torch.distr": RESHARDED
    + "the_window_is_that_of_all_terms",
    "runtime/other_ranks.py:_refuse resume with , or save at": RESHARDED
    + "as_many_ranks_load_it_in_each_way",
    "runtime/checkpoint.py:load_files give the files of all ra": RESHARDED
    + "files_of_two_saves_are_refused",
    "_torch.py:check_version install a tested torch,": (
        Untried("needs another torch than the one that is installed")
    ),
    "_torch.py:missing_name install a tested torch,": Untried(
        "needs another torch than the one that is installed"
    ),
    "runtime/accumulators.py:Accumulators.check_trainable change it at a boundary,": WINDOWS
    + "a_change_of_requires_grad",
    "capture/handlers.py:_check_groups set group['lr'] before t": STEPS
    + "hyper_parameters_are_set_ahead_or_by_a_scheduler",
    "capture/handlers.py:_weigh add the weights up first": STEPS
    + "weights_are_added_up_and_are_one_number",
    "api.py:_step pass the function itself": (
        "tests/test_options.py::test_a_step_that_cannot_be_called"
    ),
    "api.py:_step put @ above @gradsync_fx": (
        "tests/test_options.py::test_the_decorator_stands_below_these"
    ),
    'backend.py:_compiled write options={"gradient': (
        "tests/test_options.py::test_options_of_the_backend_are_names_and_values"
    ),
    "options.py:_check_group pass what dist.new_group": (
        "tests/test_options.py::test_a_rank_outside_of_the_group_is_told_so"
    ),
    'options.py:_check_mesh init_device_mesh("cpu",': "tests/test_two_levels.py::test_the_numbers_of_one_level",
    "options.py:Options._check_shards pass shard_optimizer=Tru": (
        "tests/test_hidden_gathers.py::test_it_needs_shards"
    ),
    "comm/arrivals.py:Arrival.check call step.settle() befor": (
        "tests/test_hidden_gathers.py::"
        "test_a_write_between_calls_is_named_and_settling_first_is_the_way_out"
    ),
    "runtime/ballot.py:Ballot._mine return True or False fro": (
        "tests/test_commit.py::test_commit_that_returns_nothing_is_named"
    ),
    "runtime/captured_facts.py:_check_refusable leave commit out, or wri": (
        "tests/test_commit.py::test_parameters_that_forward_writes_are_refused_by_name"
    ),
    "runtime/refusals.py:used_in_commit keep what commit needs (": (
        "tests/test_commit.py::test_the_step_is_not_used_inside_of_commit_and_losses_decide"
    ),
    "comm/replica_check.py:check_optimizers build, load and change t": (
        "tests/optim/test_likeness.py::test_made_alike_after_the_error"
    ),
    "comm/rendezvous.py:check_same_kind with shard_optimizer=Tru": SHARDS
    + "a_state_is_asked_for_by_every_rank",
    "optim/shares.py:_another_kind set what changed before": SHARDS
    + "another_kind_of_update_takes_a_new_optimizer",
    "optim/shares.py:_over_several leave shard_optimizer ou": SHARDS
    + "what_does_not_go_together_is_left_out",
    "optim/shares.py:refuse_opaque leave shard_optimizer ou": SHARDS
    + "what_does_not_go_together_is_left_out",
    "optim/shares.py:refuse_divided pass shard_optimizer=Tru": (
        "tests/test_ranks_sharded.py::test_states_go_both_ways"
    ),
    "optim/shares.py:shares_of make a new optimizer, an": SHARDS
    + "another_group_of_ranks_takes_a_new_optimizer",
    "options.py:_not_together leave  out and keep shar": (
        "tests/test_two_levels.py::test_a_mesh_beside_shared_updates_is_refused"
    ),
    "runtime/captured_facts.py:_check_reduced_here leave that reduction out": SHARDS
    + "what_does_not_go_together_is_left_out",
    "runtime/optimizer_shards.py:OptimizerShards.__init__ call step.prepare(...) w": SHARDS
    + "pieces_are_of_an_optimizer_that_is_divided",
    "runtime/optimizer_shards.py:OptimizerShards.load_state_dict load it into the optimiz": SHARDS
    + "pieces_are_of_an_optimizer_that_is_divided",
    "runtime/sharing.py:_Divided._check_alike load the same state on e": SHARDS
    + "a_state_is_loaded_on_every_rank",
    "runtime/sharing.py:divide leave that method out, o": SHARDS
    + "what_does_not_go_together_is_left_out",
    "planning/levels.py:_unfit": "tests/test_two_levels.py::test_the_numbers_of_one_level",
    'options.py:_check_backend leave it out for "induct': (
        "tests/test_options.py::test_this_package_lowers_no_programs"
    ),
    "options.py:_check_inductors leave one of them out": (
        "tests/test_options.py::test_what_only_inductor_reads_is_refused_beside_another"
    ),
    "options.py:_check_inductors leave it outdid you mean": (
        "tests/test_options.py::test_a_setting_that_inductor_does_not_have"
    ),
    "runtime/bound_steps.py:bound_step add '__dict__' to its __": (
        "tests/test_methods.py::test_objects_with_slots"
    ),
    "optimized_step.py:OptimizedStep.__init__ make a step for each thr": (
        "tests/test_threads.py::test_two_steps_in_two_threads"
    ),
    "backend.py:window compile the whole traini": WINDOWS + "the_backend_of_a_backend",
    'backend.py:_compiled leave it out for "induct': WINDOWS + "the_backend_of_a_backend",
    "runtime/window_ops.py:skip leave the call out on th": WINDOWS
    + "a_call_is_left_out_where_the_step_ends_windows",
    "capture/tracer.py:_capture pass tensors that own th": (
        Untried("no step was found that gets there: a backstop of the trace")
    ),
    "capture/tracer.py:_check call loss.backward() in": STEPS + "backward_is_called",
    "capture/inquiry.py:Inquiry.ask call loss.backward() in": (
        "tests/capture/test_inquiry.py::test_what_computes_nothing_is_told_and_the_next_call_runs"
    ),
    "capture/tracer.py:_check check requires_grad, and": STEPS
    + "the_loss_is_computed_by_the_model",
    "capture/tracer.py:_check build the optimizer from": STEPS
    + "the_optimizer_is_built_from_this_model",
    "capture/tracer.py:no_optimizer_error call optimizer.step() in": STEPS
    + "the_optimizer_is_reached_in_every_call",
    "capture/tracer.py:hook_error remove the hook, and do": STEPS + "a_hooks_work_is_done_between",
    "runtime/captured_facts.py:_weighing call it with the number": STEPS + "the_weight_is_said",
    "runtime/refusals.py:another_object make a step of its own f": WINDOWS
    + "another_model_has_a_step_of_its_own",
    "passes/base.py:_broken report it with the step:": FAULT,
    "passes/base.py:_name_culprit": FAULT,
    "passes/check_lowered.py:_fault report it with the step:": FAULT,
    "comm/collectives.py:_differ call it on every rank, o": (
        "tests/test_ranks_remaining.py::test_a_result_that_one_rank_uses"
    ),
    "comm/collectives.py:_no_data give every rank the same": (
        "tests/test_ranks_remaining.py::test_a_result_that_one_rank_uses"
    ),
    "cli/factory.py:_raised": Untried("how to look further, at the user's own exception"),
    "cli/subprocess_job.py:_answer build less (a meta devic": (
        Untried("needs a factory that takes longer than a default of minutes")
    ),
    "cli/subprocess_job.py:_answer": Untried("how to look further, at a process that died"),
    "cli/conversions.py:convert_script": "tests/cli/test_conversions.py::test_what_is_no_script",
    "cli/conversions.py:convert_script run the script alone; it": (
        "tests/cli/test_conversions.py::test_what_is_no_script"
    ),
    "cli/outputs.py:check_outputs": "tests/cli/test_main.py::test_files",
    "cli/outputs.py:save_output": "tests/cli/test_main.py::test_files",
    "cli/outputs.py:_stdout": "tests/cli/test_main.py::test_files",
    "checking/copies.py:copied pass model and optimizer": (
        "tests/checking/test_self_check.py::test_objects_in_a_closure_and_in_self"
    ),
    "checking/copies.py:_Copier.value check a step without it,": WINDOWS
    + "a_checks_objects_are_arguments",
    "capture/counts.py:FollowedNumber.check keep it in an attribute,": STEPS
    + "a_count_in_an_attribute_or_outside",
    "eager_loops.py:diagnose pass the number of micro": WINDOWS + "a_diagnosis_of_a_loop",
    "eager_loops.py:diagnose pass a function that run": WINDOWS + "a_diagnosis_of_a_loop",
    "comm/drift.py:Drift._find look for what is not the": Untried(
        "how to look further, where parameters drift apart"
    ),
    "eager/call.py:EagerCall.update make each update a step": STEPS
    + "each_update_is_a_step_of_its_own",
    "eager/call.py:EagerCall.weigh add the weights up first": STEPS
    + "weights_are_added_up_and_are_one_number",
    "eager/call.py:EagerCall.weigh pass the sum, or the num": STEPS
    + "weights_are_added_up_and_are_one_number",
    "eager/call.py:_changed use torch's clipping, or": (
        STEPS + "a_step_that_ends_windows_eagerly_uses_torchs_clipping"
    ),
    "eager/call.py:_entangled clip each optimizer's pa": STEPS
    + "each_optimizers_parameters_are_clipped_apart",
    "eager/call.py:_read_early clip after the last back": STEPS
    + "an_eager_step_clips_after_the_last_backward",
    "eager/actions.py:Done.repeat keep the value a tensor": (
        "tests/eager/test_effects.py::test_a_value_that_was_read_on_the_host_cannot_be_made_again"
    ),
    "eager/effects.py:_differs take the count from step": (
        "tests/eager/test_effects.py::test_the_advice_of_the_refusal"
    ),
    "eager/step.py:EagerStep.__init__ leave it out, or mend th": (
        WINDOWS + "an_eager_step_without_a_reduction_in_each_call"
    ),
    "eager/step.py:EagerStep.number_of pass the optimizer to th": STEPS
    + "an_optimizer_is_given_as_an_argument",
    "eager/window.py:EagerWindow.__init__": Untried("handed on: the text is another error's"),
    "eager/window.py:_MicroStep._check_reached call optimizer.step() on": (
        WINDOWS + "windows_of_two_optimizers_reach_both_in_every_call"
    ),
    "eager/window.py:_MicroStep._weight call it with the number": STEPS + "the_weight_is_said",
    "explanation.py:explain leave it out for the ran": WINDOWS + "arguments_of_explain",
    "calibration.py:calibrate call step.flush() first,": WINDOWS + "a_calibration_between_windows",
    'capture/explained.py:explained pass on_unsupported="eag': (
        STEPS + "an_untraceable_line_is_left_out_or_the_step_runs_eagerly"
    ),
    "runtime/atomic_files.py:write_data leave the object out, or": WINDOWS + "files",
    "runtime/atomic_files.py:in_place_of make room, or name anoth": WINDOWS + "files",
    "runtime/atomic_files.py:read_data save it anew with step.s": WINDOWS + "files",
    "runtime/atomic_files.py:read_data load an earlier one": WINDOWS + "files",
    "capture/gradient_values.py:check_assigned change p.grad itself, or": STEPS
    + "gradients_are_changed_through_grad",
    "capture/in_place.py:refuse_overwritten reduce a copy (x = x.clo": (
        "tests/test_ranks_remaining.py::test_an_activation_that_is_reduced_in_forward"
    ),
    "inspection/costs.py:find_hardware pass a preset's name, or": WINDOWS + "arguments_of_explain",
    "inspection/describe.py:describe call the step, or step.p": (
        WINDOWS + "a_capture_comes_before_a_skip_and_a_report"
    ),
    "capture/accelerate.py:_check build the Accelerator wi": (
        "tests/capture/test_accelerate.py::test_two_ranks"
    ),
    "capture/accelerate.py:_check Accelerator(mixed_precis": (
        "tests/capture/test_accelerate.py::test_mixed_precision"
    ),
    "capture/accelerate.py:_backward use an optimizer of torc": (
        "tests/capture/test_accelerate.py::test_one_rank"
    ),
    "integrations/lightning.py:step_of write the step as a func": (
        Untried("a step by hand: what all other tests have")
    ),
    "integrations/lightning.py:step_of pass one of them": (
        "tests/integrations/test_lightning.py::test_one_rank"
    ),
    "integrations/lightning.py:_configured return one optimizer, or": (
        "tests/integrations/test_lightning.py::test_one_rank"
    ),
    "integrations/lightning.py:_schedule leave this scheduler out": (
        "tests/capture/test_accelerate.py::test_what_runs_after_the_step_sees_the_schedule"
    ),
    "integrations/transformers.py:GradSyncTrainerMixin.__init__ set gradient_accumulatio": (
        "tests/integrations/test_transformers.py::test_one_rank"
    ),
    "integrations/transformers.py:_check leave it out, or use tra": (
        "tests/integrations/test_transformers.py::test_one_rank"
    ),
    "integrations/transformers.py:_check override compute_loss in": (
        Untried("the loss of an overridden compute_loss is the model's to any trace")
    ),
    "runtime/consistency.py:_void": "tests/test_faults.py::test_half_an_accumulate_call",
    "capture/deferred_calls.py:_defer write it so that it can": STEPS
    + "a_helper_is_traced_or_called_outside",
    "comm/rank_failure.py:lost see whether a rank was k": (
        "tests/test_ranks_groups.py::test_torchrun_restarts_from_a_checkpoint"
    ),
    "capture/trace_state.py:Declared.check pass gradient_accumulati": (
        "tests/capture/test_accelerate.py::test_one_rank"
    ),
    "capture/trace_state.py:observed call gradsync_fx.optimiz": STEPS + "backward_is_called",
    "capture/trace_state.py:refuse": Untried("handed on: the text is its caller's"),
    "capture/trace_state.py:refuse_as": Untried("handed on: the text is another error's"),
    "capture/trace_state.py:reach pass the whole model to": (
        "tests/test_ranks_scripts.py::test_every_rank_takes_another_branch"
    ),
    "optim/opaque.py:Opaque.step keep the value on the op": STEPS
    + "what_an_update_tells_is_kept_on_the_optimizer",
    "optim/opaque.py:closure_given call backward in the ste": STEPS + "an_optimizer_with_a_closure",
    "optim/trace.py:_tried use an optimizer that to": Untried(
        "never shown: such an optimizer runs as it is"
    ),
    "options.py:Options.of remove itdid you mean ?": WINDOWS + "options",
    "options.py:_bad pass a legal value, or l": WINDOWS + "options",
    "capture/parallelism.py:_of_modules wrap the model in Distri": (
        "tests/test_ranks.py::test_sgd_equals_ddp_and_the_joined_batch"
    ),
    "capture/parallelism.py:_of_tensors leave parallelize_module": (
        "tests/test_ranks.py::test_sgd_equals_ddp_and_the_joined_batch"
    ),
    "capture/parallelism.py:_of_others run pipelines without gr": Untried(
        "it says to train without this package"
    ),
    "capture/past_autograd.py:_other_memory write into it: x.data.co": STEPS
    + "memory_is_written_into",
    "checking/reference_window.py:_refuse_originals pass model and optimizer": (
        "tests/checking/test_self_check.py::test_globals_of_an_imported_module"
    ),
    "checking/reference_window.py:_totals compare such a step by h": (
        WINDOWS + "a_check_of_a_step_without_backward_is_done_by_hand"
    ),
    "planning/setting.py:_group_of_all build them with one proc": (
        "tests/test_ranks_groups.py::test_the_data_parallel_dimension_of_a_mesh"
    ),
    "planning/setting.py:_wire use reduce_dtype=torch.b": (
        "tests/comm/test_inplace_all_reduce.py::test_sums_over_the_ranks"
    ),
    "planning/setting.py:unmapped add the optimizer to the": STEPS
    + "a_mapping_holds_every_optimizer",
    "planning/setting.py:_entangled clip each optimizer's pa": STEPS
    + "each_optimizers_parameters_are_clipped_apart",
    "comm/rendezvous.py:check_same_window call the same step on ev": (
        Untried("how to look further, where ranks run different programs")
    ),
    "comm/rendezvous.py:check_same_layout with sync_each_batch=Tru": (
        "tests/test_ranks_scripts.py::test_every_rank_takes_another_branch"
    ),
    "runtime/module_buffers.py:_apart call step.prepare(...) o": (
        "tests/runtime/test_module_buffers.py"
        "::test_ranks_that_reached_different_branches_are_refused_and_prepare_is_a_way_out"
    ),
    "comm/rendezvous.py:_disagree give every rank the same": "tests/test_ranks_ends.py::test_uneven_data",
    "capture/recurrent.py:refuse_dropout stack nn. layers with nn": (
        "tests/capture/test_recurrent.py::test_the_dropout_that_is_advised"
    ),
    "runtime/refusals.py:no_copies save step.state_dict() (": WINDOWS + "a_state_instead_of_a_copy",
    "runtime/refusals.py:nothing_captured call step.prepare(...) f": WINDOWS
    + "a_capture_comes_before_a_skip_and_a_report",
    "runtime/refusals.py:no_call_yet call the step once on ev": (
        "tests/test_ranks_ends.py::test_two_epochs_with_a_flush"
    ),
    "runtime/refusals.py:no_common_tail call the optimizers of a": (
        "tests/test_window_errors.py::test_branches_that_update_one_model_each"
    ),
    "runtime/refusals.py:changed_steps call step.flush() or ste": WINDOWS + "a_change_of_k",
    "runtime/refusals.py:changed_steps make a step of its own f": WINDOWS
    + "another_kind_of_k_is_a_step_of_its_own",
    "ir/deferral.py:check_weights sum it up: micro_batch_w": STEPS
    + "weights_are_added_up_and_are_one_number",
    "ir/deferral.py:check_weights make a step of each part": STEPS
    + "a_step_of_each_part_where_a_loss_needs_an_update",
    "ir/deferral.py:_refuse use gradient_accumulatio": STEPS
    + "gradients_are_read_after_the_last_backward",
    "capture/checkpointing.py:refuse_reentrant pass use_reentrant=False": STEPS
    + "checkpoints_of_the_other_kind",
    "comm/replica_check.py:_check_values seed all ranks alike bef": "tests/test_ranks.py::test_lin_is_exact",
    "comm/replica_check.py:_other_option pass the same arguments": "tests/test_ranks.py::test_lin_is_exact",
    "comm/replica_check.py:_other_model build the same model on": "tests/test_ranks.py::test_lin_is_exact",
    "runtime/checkpoint.py:_read load it with torch.load,": WINDOWS + "files",
    "scaling.py:refused train in bfloat16 (torch": STEPS + "a_step_without_a_scaler",
    "checking/self_check.py:Verdict.require report it with this text": FAULT,
    "checking/self_check.py:check check the step with a nu": WINDOWS
    + "a_check_of_one_number_of_micro_steps",
    "capture/sparse.py:refuse_sparse pass sparse=False to the": STEPS
    + "sums_over_a_dense_embedding",
    "runtime/state_format.py:unpack load what step.state_dic": WINDOWS
    + "states_as_they_were_saved",
    "runtime/state_format.py:unpack resume with the saved va": WINDOWS + "states_of_other_windows",
    "runtime/state_format.py:unpack save on every rank, and": WINDOWS + "states_as_they_were_saved",
    "runtime/state_format.py:unpack call step.prepare(...),": (
        "tests/test_saved_windows.py::test_a_window_of_two_branches_goes_on_where_only_one_was_seen"
    ),
    "runtime/state_format.py:_unlikely load what step.state_dic": WINDOWS
    + "states_as_they_were_saved",
    "runtime/state_format.py:check_fits resume with the model an": WINDOWS
    + "states_as_they_were_saved",
    "runtime/state_format.py:foreign_state resume with the model th": WINDOWS
    + "states_as_they_were_saved",
    "capture/step_arguments.py:given_text set it on the optimizer": STEPS
    + "an_argument_is_set_on_the_optimizer_ahead",
    "threads.py:OneAtATime.held": Untried("handed on: the text is its maker's"),
    "threads.py: run such steps in one th": (
        "tests/test_threads.py::test_eager_steps_of_two_threads_are_refused_and_other_loops_are_not_touched"
    ),
    "capture/untouched.py:touched write it so that it can": STEPS
    + "a_helper_is_traced_or_called_outside",
    "optim/zeroing.py:why_not_later read gradients in the st": (
        "tests/test_zeroing.py::test_one_that_reads_gradients"
    ),
    "explanation.py:_on_target leave the backend out": "tests/test_targets.py::test_bad_targets",
    "lowering/target/cards.py:find_card name a target by its arc": (
        "tests/test_targets.py::test_bad_targets"
    ),
    "lowering/target/cards.py:find_card where it is the step's o": (
        "tests/test_targets.py::test_a_step_with_an_argument_target"
    ),
    "lowering/target/cards.py:check_toolchain": Untried("it installs compilers"),
    "lowering/target/guard.py:_build install a newer one: apt": Untried("it installs a compiler"),
    "lowering/target/apart.py:apart where it was killed, mem": (
        Untried("needs a machine that is short of memory")
    ),
    "comm/host_group.py:_beside_of use a torch with gloo, o": (
        Untried("needs another torch than the one that is installed, or a group over MPI")
    ),
    "inspection/capacity.py:_apart have FACTORY return a la": (
        "tests/cli/test_plan.py::test_a_factory_that_takes_the_micro_batch_is_asked_for_it"
    ),
}
