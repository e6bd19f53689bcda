//! Names as long as a model's id and its ranks need.

use super::{Keeper, NamedWeights, SharedWeights, Stage, WAIT, WEIGHTS_NAME_BYTES_MAX, byte_of};

/// As long as a name may be, in parts.
fn longest() -> String {
    let name = "meta-llama/Llama-3.1-405B-Instruct-FP8/int8/tp0of8/";
    let filled = "n".repeat(WEIGHTS_NAME_BYTES_MAX - name.len());
    format!("{name}{filled}")
}

#[test]
fn weights_with_names_of_200_bytes_are_kept_opened_listed_taken_over_and_leave_no_file() {
    let stage = Stage::new();
    let name = longest();
    let keep = || Keeper::new(&name, stage.domain.options()).unwrap();
    let keeper = keep();
    let published = stage
        .weights(7)
        .publish(&stage.domain, &name, WAIT)
        .unwrap();
    let shared = SharedWeights::open(&name, stage.options(), WAIT).unwrap();
    assert_eq!(byte_of(&shared), 7);
    let listed = NamedWeights::list(&stage.domain, None).unwrap();
    let found: Vec<_> = listed.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(found, [name.as_str()]);
    assert!(
        listed[0].keeper.is_some() && listed[0].holders == 1,
        "{listed:?}"
    );
    for file in std::fs::read_dir(&stage.folder).unwrap() {
        assert!(file.unwrap().file_name().len() <= 255);
    }
    drop((keeper, published));
    let keeper = keep();
    assert_eq!(
        (
            keeper.state().unwrap().candidate,
            keeper.state().unwrap().unanswered
        ),
        (Some(1), 0)
    );
    assert_eq!(
        SharedWeights::verify(&name, stage.options(), WAIT).unwrap(),
        1
    );
    assert_eq!(keeper.state().unwrap().version, Some(1));
    drop((keeper, shared));
    assert_eq!(std::fs::read_dir(&stage.folder).unwrap().count(), 0);
    let refused = Keeper::new(&format!("{name}n"), stage.domain.options());
    let refused = refused.unwrap_err();
    assert!(refused.to_string().contains("200 bytes"), "{refused}");
    assert_eq!(refused.hint().as_deref(), Some("take a shorter name"));
}
