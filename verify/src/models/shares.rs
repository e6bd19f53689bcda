//! The words of shared allocations: what a receiver has is not let go.

use std::sync::Arc;

use crate::backend::Access;
use crate::lend::share_words::{SLOTS, ShareWords, close, has_claim, slot};
use crate::lend::{Offer, OfferPlace};
use crate::shm::page::{SharedPage, words_bytes};
use crate::verify::models::Model;
use crate::verify::{page, touch};

pub const WITHDRAWN: Model = Model {
    name: "a share is claimed or withdrawn",
    bound: 3,
    body: withdrawn,
};
pub const ENDED: Model = Model {
    name: "memory whose offer ends is not let go while a receiver has it",
    bound: 3,
    body: ended,
};
pub const LENT: Model = Model {
    name: "a block whose lend ends is not let go while one of its peers has it",
    bound: 3,
    body: lent,
};
pub const CLOSED: Model = Model {
    name: "a page that is closed while its receiver claims says so, or has the claim",
    bound: 3,
    body: closed,
};
pub const GIVEN_BACK: Model = Model {
    name: "a share that is given back and claimed again is not over",
    bound: 3,
    body: given_back,
};

/// In slot 1.
const NUMBER: u64 = SLOTS as u64 + 1;

/// A share, and a receiver's page, with the words that two threads use made.
fn share() -> (Arc<ShareWords>, Arc<SharedPage>) {
    let (words, _) = ShareWords::create().expect("pages");
    words.state(NUMBER).touch();
    offered(words)
}

fn offered(words: ShareWords) -> (Arc<ShareWords>, Arc<SharedPage>) {
    let page = page(words_bytes(2));
    let offer = Offer {
        bytes: 1,
        place: OfferPlace::Run {
            run: 1,
            pieces: 1,
            piece: 1,
            offset: 0,
            access: Access::Read,
        },
        ready: None,
    };
    words.offer(NUMBER, &offer).expect("an offer");
    words.offer_words(NUMBER)[..4]
        .iter()
        .for_each(|word| word.touch());
    touch(page.word(0));
    touch(page.word(slot(NUMBER) as usize));
    (Arc::new(words), Arc::new(page))
}

fn claims(words: &ShareWords, page: &SharedPage) -> bool {
    let offer = words.claim(page, NUMBER, "a model");
    offer.expect("a whole offer").is_some()
}

/// The share, and whether a receiver that claims it on a thread of its own has it.
fn race(owner: impl FnOnce(&ShareWords, &SharedPage) -> bool) -> (bool, bool) {
    race_for(share(), owner)
}

fn race_for(
    (words, page): (Arc<ShareWords>, Arc<SharedPage>),
    owner: impl FnOnce(&ShareWords, &SharedPage) -> bool,
) -> (bool, bool) {
    let (theirs, claim) = (words.clone(), page.clone());
    let receiver = loom::thread::spawn(move || claims(&theirs, &claim));
    let is_let_go = owner(&words, &page);
    let is_claimed = receiver.join().expect("the receiver");
    assert_eq!(is_claimed, has_claim(&page, NUMBER));
    (is_let_go, is_claimed)
}

fn withdrawn() {
    let (is_let_go, is_claimed) = race(|words, _| words.withdraw(NUMBER));
    assert_ne!(is_let_go, is_claimed);
}

fn ended() {
    let (is_let_go, is_claimed) = race(|words, page| {
        words.end(NUMBER);
        !words.look([page], NUMBER).is_held
    });
    assert!(!(is_let_go && is_claimed), "it is let go while it is open");
}

fn lent() {
    let (words, _) = ShareWords::for_many(SLOTS).expect("a page");
    let (is_let_go, is_claimed) = race_for(offered(words), |words, page| {
        words.end(NUMBER);
        !has_claim(page, NUMBER)
    });
    assert!(!(is_let_go && is_claimed), "it is let go while it is open");
}

fn closed() {
    let (is_let_go, is_claimed) = race(|words, page| {
        close(page);
        !words.look([page], NUMBER).is_held
    });
    assert!(!(is_let_go && is_claimed), "it is let go while it is open");
}

fn given_back() {
    let (words, page) = share();
    let (theirs, claim) = (words.clone(), page.clone());
    let receiver = loom::thread::spawn(move || {
        assert!(claims(&theirs, &claim));
        theirs.give_back(claim.word(slot(NUMBER) as usize), NUMBER);
        assert!(claims(&theirs, &claim));
    });
    assert!(!words.look([&*page], NUMBER).is_over, "it is lost");
    receiver.join().expect("the receiver");
}
