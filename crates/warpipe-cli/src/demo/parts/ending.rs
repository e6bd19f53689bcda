//! After the parts: every process ends, and nothing is left over.

use crate::demo::Plant;
use crate::demo::leftovers::files;
use crate::demo::protocol::{Counts, Event};
use crate::demo::stage::Stage;

/// Ends all processes, and checks the claims that hold then.
pub fn run(stage: &mut Stage) -> anyhow::Result<()> {
    let mut reports = 0;
    let living = stage.subscribers.len() + 1;
    for (id, event) in stage.end_all()? {
        match event {
            Event::Finished { counts } => stage.record(id, counts),
            Event::Left { extra } => {
                reports += 1;
                let role = stage.role(id);
                stage.left.extend(
                    extra
                        .iter()
                        .map(|(what, count)| format!("{count} {what} of the {role}")),
                );
            }
            _ => {}
        }
    }
    if stage.is_planted(Plant::Leftover) {
        std::fs::write(stage.domain().join("planted"), "")?;
    }
    let found = files(&stage.domain())?;
    stage
        .left
        .extend(found.into_iter().map(|file| format!("the file {file}")));
    let Counts { wrong, gaps, .. } = stage.total();
    stage.claim("every word was right", wrong == 0, || {
        format!("{wrong} items held wrong words")
    });
    stage.claim("every item came in its turn", gaps == 0, || {
        format!("{gaps} items came out of order")
    });
    let killed = stage.killed;
    stage.claim("two processes were killed", killed == 2, || {
        format!("{killed} were")
    });
    stage.claim(
        "every survivor looked for what it left over",
        reports == living,
        || format!("{reports} of {living} reported"),
    );
    let left = stage.left.join(", ");
    stage.claim("nothing is left over", left.is_empty(), || left);
    Ok(())
}
