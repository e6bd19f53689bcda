//! What a peer has of weights.

use std::sync::mpsc;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use warpipe::weights::{Keeper, PublishedWeights, SharedWeights};

use super::order::Answer;
use crate::PATIENCE;
use crate::context::Context;
use crate::weights_in_place::{self, Segments};

/// An order with weights of a name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum WeightsOrder {
    /// Keep them.
    Keep {
        /// The name.
        name: String,
    },
    /// Publish tensors where they lie. Answers with the version's number.
    PublishInPlace {
        /// The name.
        name: String,
        /// The segments that they lie in.
        segments: Segments,
        /// The seed of the first tensor's words.
        seed: u64,
    },
    /// Open them, check them, and keep them open.
    Open {
        /// The name.
        name: String,
        /// The seed of the first tensor's words.
        seed: u64,
    },
}

/// Held until the peer ends.
#[derive(Default)]
pub struct WeightsHolder {
    keepers: Vec<Keeper>,
    published: Vec<PublishedWeights>,
    shared: Vec<SharedWeights>,
}

impl WeightsHolder {
    /// Carries out an order.
    ///
    /// # Errors
    /// Those of the library; weights with wrong words.
    pub fn carry_out(&mut self, context: &Context, order: WeightsOrder) -> Result<Answer> {
        match order {
            WeightsOrder::Keep { name } => self
                .keepers
                .push(Keeper::new(&name, context.domain.options())?),
            WeightsOrder::PublishInPlace {
                name,
                segments,
                seed,
            } => {
                let weights =
                    weights_in_place::weights(context, segments, seed, &mpsc::channel().0)?;
                let published = weights.publish(&context.domain, &name, PATIENCE)?;
                let version = published.version;
                self.published.push(published);
                return Ok(Answer::Number(version));
            }
            WeightsOrder::Open { name, seed } => {
                let shared =
                    SharedWeights::open(&name, context.domain.on(&context.device), PATIENCE)?;
                weights_in_place::check(context, &mut context.error_counters()?, &shared, seed)?;
                self.shared.push(shared);
            }
        }
        Ok(Answer::Done)
    }
}
