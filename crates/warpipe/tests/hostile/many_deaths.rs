//! Many members that die at the same moment.

use std::collections::BTreeSet;

use super::stage::{LONG, Scratch, TestProcess, domain_of_test, eventually, next_order, role};
use crate::{Change, Member, Members};

/// As many as one process may connect to at one moment.
const MEMBERS: usize = 60;

#[test]
fn members_that_die_at_once_are_all_reported_and_cleaned_up_after_in_few_looks_at_the_directory() {
    let test = "members_that_die_at_once_are_all_reported_and_cleaned_up_after_in_few_looks_at_the_directory";
    if role().as_deref() == Some("members") {
        let domain = domain_of_test();
        let join = |number: usize| Member::new(&format!("m{number}"), domain.options()).unwrap();
        let _members: Vec<Member> = (0..MEMBERS).map(join).collect();
        println!("joined:");
        next_order();
        return;
    }
    let scratch = Scratch::new();
    let mut process = TestProcess::start(module_path!(), test, "members", &scratch);
    process.hear("joined:");
    let members = Members::new(scratch.domain.options()).unwrap();
    for _ in 0..MEMBERS {
        let change = members.changes(LONG).unwrap();
        assert!(matches!(change, Some(Change::Joined(_))), "{change:?}");
    }
    let before = scratch.domain.reads();
    process.kill();
    let (mut dead, mut left) = (0, BTreeSet::new());
    while dead < MEMBERS {
        match members.changes(LONG).unwrap().expect("every death") {
            Change::Died(member) => {
                left.extend(member.endpoints);
                dead += 1;
            }
            // Its word stands still before its lifeline ends, if this machine is slow.
            Change::Stalled(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(left.len(), MEMBERS, "what their process left: {left:?}");
    let looks = scratch.domain.reads() - before;
    assert!(looks < MEMBERS / 2, "{looks} looks for {MEMBERS} deaths");
    eventually("nothing is left", || {
        scratch.domain.endpoints().unwrap().is_empty()
    });
}
