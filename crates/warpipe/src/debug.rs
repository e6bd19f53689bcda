//! `Debug` of types that hold more than a reader wants to see.

/// Derives a `Debug` that shows these fields and, behind `;`, what these methods return.
macro_rules! opaque_debug {
    ($type:ident $(<$life:lifetime>)? { $($field:ident),* $(; $($method:ident),*)? }) => {
        #[automatically_derived]
        impl std::fmt::Debug for $type $(<$life>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($type))
                    $(.field(stringify!($field), &self.$field))*
                    $($(.field(stringify!($method), &self.$method()))*)?
                    .finish_non_exhaustive()
            }
        }
    };
}
pub(crate) use opaque_debug;
