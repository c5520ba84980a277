//! Memory that is read after a product, asked for while the product multiplies.

use crate::prefetch;

/// Values that are asked for at once: few enough that the processor still has room for the product's own reading.
const AT_ONCE: usize = 6 * 32;

/// Half-precision values, in pieces of any size, for which a product asks while the multipliers, not memory, hold it up.
pub struct Ahead<'p, 'm> {
    pieces: Option<&'p mut dyn Iterator<Item = &'m [u16]>>, // None when all were taken.
    piece: &'m [u16],                                       // What is left of the last.
}

impl<'p, 'm> Ahead<'p, 'm> {
    /// The pieces in their order, as far as the product gets.
    pub fn new(pieces: &'p mut dyn Iterator<Item = &'m [u16]>) -> Ahead<'p, 'm> {
        Ahead {
            pieces: Some(pieces),
            piece: &[],
        }
    }

    /// No memory.
    #[must_use]
    pub fn nothing() -> Ahead<'p, 'm> {
        Ahead {
            pieces: None,
            piece: &[],
        }
    }

    /// Asks for the next few cache lines.
    #[cfg_attr(not(any(test, target_arch = "x86_64")), expect(dead_code))]
    #[inline(always)]
    pub(crate) fn ask(&mut self) {
        if let Some((now, later)) = self.piece.split_first_chunk::<AT_ONCE>() {
            prefetch(now);
            self.piece = later;
        } else if self.pieces.is_some() {
            self.turn();
        }
    }

    /// Asks for the rest of a piece, and goes on to the next.
    #[cold]
    fn turn(&mut self) {
        prefetch(self.piece);
        let next = self.pieces.as_mut().and_then(|pieces| pieces.next());
        if next.is_none() {
            self.pieces = None;
        }
        self.piece = next.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_taken_one_by_one_to_the_last() {
        let memory = [0; 3 * AT_ONCE];
        let sizes = [2 * AT_ONCE + 1, 0, AT_ONCE - 1, AT_ONCE];
        let mut taken = 0;
        let mut pieces = sizes.iter().map(|size| {
            taken += 1;
            &memory[..*size]
        });
        let mut ahead = Ahead::new(&mut pieces);
        let mut left = Vec::new();
        while ahead.pieces.is_some() {
            ahead.ask();
            left.push(ahead.piece.len());
        }
        let expected = [
            2 * AT_ONCE + 1,
            AT_ONCE + 1,
            1,
            0,
            AT_ONCE - 1,
            AT_ONCE,
            0,
            0,
        ];
        assert_eq!(left, expected);
        ahead.ask();
        assert!(ahead.pieces.is_none() && ahead.piece.is_empty());
        assert_eq!(taken, sizes.len());
    }
}
