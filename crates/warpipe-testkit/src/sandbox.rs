//! System calls that the kernel refuses, as it does in a sandbox.

/// Has the kernel refuse these system calls with these errors from now on, to this thread and those
/// that it starts.
///
/// # Panics
/// The kernel takes no filter.
pub fn refuse_calls(calls: &[(libc::c_long, libc::c_int)]) {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let is_equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, skipped, k| libc::sock_filter {
        code,
        jt: 0,
        jf: skipped,
        k,
    };
    // The number of the call is the first word.
    let mut filter = vec![line(load, 0, 0)];
    for &(call, error) in calls {
        filter.push(line(is_equal, 1, call as u32));
        filter.push(line(answer, 0, libc::SECCOMP_RET_ERRNO | error as u32));
    }
    filter.push(line(answer, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the kernel copies the program, which lives across the call.
    let codes = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program),
        ]
    };
    assert_eq!(codes, [0, 0]);
}
