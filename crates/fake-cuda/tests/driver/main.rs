//! The CUDA backend over the fake driver, each case in a process of its own: the driver's library,
//! the environment and the contexts are per process.

mod cases;
mod control;
mod exit;
mod failures;
mod gather;
mod legacy;
mod process;
mod transfers;

use process::FakeDriver;

#[test]
fn a_device_opened_twice_is_one_and_a_caller_keeps_its_context() {
    FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .run(cases::OPEN);
}

#[test]
fn a_region_is_shared_by_descriptor_and_leaves_nothing_behind() {
    FakeDriver::new().run(cases::REGION);
}

#[test]
fn a_stream_waits_for_a_word_that_another_stream_writes() {
    FakeDriver::new()
        .env("FAKE_CUDA_DELAY_US", "2000")
        .run(cases::TIMELINE);
}

#[test]
fn many_signals_are_stored_by_one_kernel_behind_earlier_work() {
    // If one of these were used for the signals, the batch would fail.
    let fail = "cuStreamBatchMemOp_v2:1:999,cuStreamWriteValue64_v2:1:999";
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", fail)
        .run(cases::BROADCAST);
}

#[test]
fn a_kernel_runs_and_its_bytes_come_back() {
    FakeDriver::new().run(cases::KERNEL);
}

#[test]
fn long_rows_are_copied_by_the_driver_and_no_further_than_the_memory_goes() {
    // The two launches before it are those of the library's own kernels when the device is opened.
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", "cuLaunchKernel:3:999")
        .run(cases::GATHER_BOXES);
}

#[test]
fn short_and_turned_rows_are_copied_by_the_kernel_and_no_further_than_the_memory_goes() {
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", "cuMemcpy3DAsync_v2:1:999")
        .run(cases::GATHER_KERNEL);
}

#[test]
fn a_kernel_reaches_no_plain_memory_of_another_gpu() {
    FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .run(cases::GATHER_FROM_ANOTHER_GPU);
}

#[test]
fn registered_memory_may_be_reused_as_soon_as_an_upload_returns() {
    FakeDriver::new().run(cases::UPLOAD);
}

#[test]
fn an_upload_behind_a_stream_that_waits_returns_before_the_wait_is_over() {
    FakeDriver::new().run(cases::UPLOAD_BEHIND_A_WAIT);
}

#[test]
fn the_fake_driver_blocks_a_pageable_copy_behind_a_wait_as_a_driver_may() {
    FakeDriver::new().run(cases::PAGEABLE_CONTROL);
}

#[test]
fn uploads_behind_a_stream_that_waits_are_limited_by_a_typed_error_and_the_room_comes_back() {
    FakeDriver::new().run(cases::UPLOAD_LIMIT);
}

#[test]
fn where_processes_take_turns_short_uploads_go_to_the_copy_engine_as_two_rows() {
    FakeDriver::new()
        .env("FAKE_CUDA_NO_MPS", "1")
        .env("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:1:999")
        .run(cases::SHORT_UPLOADS);
}

#[test]
fn under_mps_short_uploads_are_the_driver_s_own() {
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", "cuMemcpy3DAsync_v2:1:999")
        .run(cases::SHORT_UPLOADS_UNDER_MPS);
}

#[test]
fn pieces_that_are_uploaded_together_lie_one_behind_the_other() {
    for mps in [None, Some("1")] {
        let driver = FakeDriver::new();
        let driver = match mps {
            Some(no) => driver.env("FAKE_CUDA_NO_MPS", no),
            None => driver,
        };
        driver.run(cases::UPLOAD_PIECES);
    }
}

#[test]
fn ranges_that_are_copied_to_the_host_come_one_behind_the_other_and_their_memory_is_used_again() {
    FakeDriver::new()
        .env("FAKE_CUDA_DELAY_US", "500")
        .run(cases::COPY_TO_HOST);
}

#[test]
fn copies_to_the_host_that_are_kept_hold_up_no_others() {
    FakeDriver::new().run(cases::COPIES_TO_HOST_THAT_ARE_KEPT);
}

#[test]
fn a_copy_to_the_host_behind_a_stream_that_waits_ends_in_a_typed_timeout() {
    FakeDriver::new().run(cases::COPY_TO_HOST_LIMIT);
}

#[test]
fn a_refused_copy_to_the_host_waits_for_the_copies_before_it() {
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync_v2:2:999")
        .run(cases::REFUSED_COPY_TO_HOST);
}

#[test]
fn a_download_behind_a_stream_that_waits_ends_in_a_typed_timeout_and_touches_nothing_afterwards() {
    FakeDriver::new().run(cases::DOWNLOAD_LIMIT);
}

#[test]
fn a_download_that_a_call_refuses_has_no_copy_under_way_when_it_returns() {
    FakeDriver::new().run(cases::REFUSED_DOWNLOAD);
}

#[test]
fn a_download_into_page_locked_memory_is_limited_before_it_begins_and_touches_nothing_afterwards() {
    FakeDriver::new().run(cases::DOWNLOAD_IN_PLACE);
}

#[test]
fn a_panic_on_the_cpu_does_not_reach_the_driver() {
    FakeDriver::new().run(cases::CALL);
}

#[test]
fn an_event_is_complete_when_its_stream_has_come_there() {
    FakeDriver::new().run(cases::EVENT);
}

#[test]
fn a_test_has_calls_of_the_fake_driver_counted_failed_and_held_up() {
    FakeDriver::new().run(cases::CONTROL);
}

#[test]
fn a_reset_does_not_return_while_a_stream_of_the_device_waits() {
    FakeDriver::new().run(cases::RESET_BESIDE_A_WAIT);
}

#[test]
fn a_driver_without_a_function_fails_by_name_where_it_is_needed() {
    FakeDriver::new()
        .without("cuMemCreate")
        .run(cases::MISSING_SYMBOL);
}

#[test]
fn an_old_driver_without_the_newer_of_two_functions_still_serves() {
    FakeDriver::new()
        .without("cuDeviceGetUuid_v2")
        .without("cuFuncLoad")
        .run(cases::KERNEL);
}

#[test]
fn no_visible_gpu_is_an_error_that_names_the_variable() {
    FakeDriver::new()
        .env("CUDA_VISIBLE_DEVICES", "")
        .run(cases::NO_DEVICE);
}

#[test]
fn a_library_that_cannot_be_loaded_is_no_driver() {
    FakeDriver::new().broken().run(cases::NO_DRIVER);
}

#[test]
fn a_mismatch_of_driver_versions_says_what_to_do() {
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", "cuInit:1:803")
        .run(cases::MISMATCH);
}

#[test]
fn a_device_without_room_says_how_much_is_free_and_keeps_nothing() {
    FakeDriver::new()
        .env("FAKE_CUDA_MEMORY_MB", "4")
        .run(cases::EXHAUSTION);
}

#[test]
fn a_failure_at_any_step_of_an_allocation_is_undone() {
    for step in [
        "cuMemCreate:1:2",
        "cuMemAddressReserve:1:2",
        "cuMemMap:1:999",
        "cuMemSetAccess:1:999",
    ] {
        FakeDriver::new()
            .env("FAKE_CUDA_FAIL", step)
            .run(cases::FAILED_ALLOCATION);
    }
}

#[test]
fn a_failure_at_any_step_of_an_import_is_undone() {
    for step in [
        "cuMemImportFromShareableHandle:1:999",
        "cuMemAddressReserve:2:2",
        "cuMemMap:2:801",
        "cuMemSetAccess:2:999",
    ] {
        FakeDriver::new()
            .env("FAKE_CUDA_FAIL", step)
            .run(cases::FAILED_IMPORT);
    }
}

#[test]
fn memory_of_other_code_is_let_go_later_if_neither_its_length_nor_its_release_comes_now() {
    FakeDriver::new()
        .env(
            "FAKE_CUDA_FAIL",
            "cuMemGetAddressRange_v2:1:999,cuMemRelease:1:999",
        )
        .run(cases::FAILED_RETAIN);
}

#[test]
fn a_failure_after_registering_is_undone() {
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", "cuMemHostGetDevicePointer_v2:1:1")
        .run(cases::FAILED_REGISTER);
}

#[test]
fn memory_for_copies_that_the_device_cannot_address_is_let_go_once_no_stream_waits() {
    // The calls before are those of the server's page and of the words.
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", "cuMemHostGetDevicePointer_v2:3:1")
        .run(cases::FAILED_STAGING);
}

#[test]
fn words_that_were_unregistered_and_unmapped_are_not_read_again() {
    FakeDriver::new().run(cases::UNMAPPED_WORDS);
}

#[test]
fn a_failure_while_a_device_is_opened_leaves_it_to_be_opened_again() {
    let retain = "cuDevicePrimaryCtxRetain:1:2";
    for step in [
        retain,
        "cuModuleLoadDataEx:1:218",
        "cuLaunchKernel:1:719",
        "cuLaunchKernel:2:719",
    ] {
        FakeDriver::new()
            .env("FAKE_CUDA_FAIL", step)
            .run(cases::FAILED_OPEN);
    }
}

#[test]
fn a_descriptor_that_is_no_device_memory_is_refused() {
    FakeDriver::new().run(cases::FOREIGN_DESCRIPTORS);
}

#[test]
fn a_kernel_that_writes_a_read_only_import_dies() {
    FakeDriver::new().dies_by(11, cases::READ_ONLY);
}

#[test]
fn memory_of_a_gpu_out_of_reach_is_refused_by_name() {
    FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .env("FAKE_CUDA_NO_PEER", "1")
        .run(cases::PEERS_APART);
}

#[test]
fn memory_of_a_peer_gpu_is_imported() {
    FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .run(cases::PEERS);
}

#[test]
fn a_gpu_keeps_its_identity_whatever_its_ordinal() {
    FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .env("CUDA_VISIBLE_DEVICES", "1,0")
        .run(cases::IDENTITY);
}

#[test]
fn a_legacy_handle_opens_once_stays_with_a_dead_exporter_and_opens_no_more() {
    FakeDriver::new().run(cases::LEGACY);
}

#[test]
fn legacy_memory_that_the_driver_does_not_close_is_closed_later() {
    let fail = [1, 2, 4].map(|call| format!("cuIpcCloseMemHandle:{call}:999"));
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", &fail.join(","))
        .run(cases::LEGACY_REFUSED_CLOSE);
}

#[test]
fn a_legacy_handle_of_freed_memory_is_stale() {
    FakeDriver::new().run(cases::LEGACY_FREED);
}

#[test]
fn bytes_that_are_no_handle_a_length_that_lies_and_a_second_close_are_refused() {
    FakeDriver::new().run(cases::LEGACY_RAW);
}

#[test]
fn a_legacy_handle_opens_in_the_process_that_made_it() {
    FakeDriver::new().run(cases::LEGACY_OWN);
}

#[test]
fn memory_that_no_legacy_handle_can_name_is_refused_by_its_kind() {
    FakeDriver::new().run(cases::LEGACY_KINDS);
}

#[test]
fn a_legacy_handle_of_a_peer_gpu_opens() {
    FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .run(cases::LEGACY_PEERS);
}

#[test]
fn a_legacy_handle_of_a_gpu_out_of_reach_is_refused_by_name() {
    let fake_driver = FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .env("FAKE_CUDA_NO_PEER", "1");
    fake_driver.run(cases::LEGACY_PEERS_APART);
}

#[test]
fn a_legacy_handle_of_a_hidden_gpu_says_that_it_is_hidden() {
    FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .env("CUDA_VISIBLE_DEVICES", "1")
        .run(cases::LEGACY_HIDDEN);
}

#[test]
fn memory_is_exported_by_the_device_that_owns_it() {
    FakeDriver::new()
        .env("FAKE_CUDA_DEVICES", "2")
        .run(cases::LEGACY_OTHER_DEVICE);
}

#[test]
fn the_interprocess_events_of_a_process_are_limited_by_a_typed_error() {
    FakeDriver::new().run(cases::IPC_EVENTS);
}

#[test]
fn a_driver_without_an_interprocess_event_left_says_so_whoever_has_them() {
    let fail = "cuEventCreate:1:2,cuEventCreate:2:205";
    FakeDriver::new()
        .env("FAKE_CUDA_FAIL", fail)
        .run(cases::IPC_EVENTS_OF_OTHERS);
}

#[test]
fn a_process_that_exits_while_memory_waits_for_a_stream_ends_well() {
    let said = FakeDriver::new().ends_with(0, cases::EXIT_RETIRED);
    assert!(said.contains(exit::LAST_WORDS), "{said}");
}

#[test]
fn a_process_that_exits_while_its_threads_ask_the_driver_ends_well() {
    let said = FakeDriver::new().ends_with(0, cases::EXIT_POLLING);
    assert!(said.contains(exit::LAST_WORDS), "{said}");
}

#[test]
fn a_function_behind_a_streams_work_may_end_the_process() {
    let said = FakeDriver::new().ends_with(0, cases::EXIT_IN_CALLBACK);
    assert!(said.contains(exit::LAST_WORDS), "{said}");
}

#[test]
fn a_thread_that_asks_the_driver_past_the_gate_ends_an_exiting_process_badly() {
    let said = FakeDriver::new().dies_by(6, cases::EXIT_WITHOUT_GATE);
    assert!(
        said.contains("cuDeviceGetCount while the driver is torn down"),
        "{said}"
    );
}

#[test]
fn a_destructor_that_runs_after_the_driver_is_answered_that_it_is_gone() {
    FakeDriver::new().ends_with(exit::ANSWERED, cases::EXIT_DESTRUCTOR);
}

/// Runs one case; started by the tests above in a process with the fake driver in place.
#[test]
#[ignore = "a part of the other tests"]
fn child() {
    let name = std::env::var(process::CASE).expect("started by another test of this file");
    cases::run(&name);
}
