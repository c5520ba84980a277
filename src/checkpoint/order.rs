//! The orders in which files store the rows and the columns of a matrix.

/// The order of the rows or of the columns of a matrix in its file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum FileOrder {
    /// The order of the matrix.
    #[default]
    Same,
    /// The rows of each head are in the order for rotations of neighbouring values, as GGUF files
    /// of the `llama` architecture have them. This engine rotates value i together with value
    /// i + head_dim / 2.
    Interleaved {
        /// The size of a head.
        head_dim: usize,
    },
    /// The value heads of recurrent layers are in tiles, as GGUF files have them: a value head of
    /// each key head, and again one of each. In the matrix, the value heads of a key head are side
    /// by side.
    Tiled {
        /// The rows or columns before the value heads.
        first: usize,
        key_heads: usize,
        /// The number of value heads of a key head.
        group: usize,
        /// The rows or columns of a value head.
        dim: usize,
    },
}

impl FileOrder {
    /// Returns which row or column of the file is number `index` of the matrix.
    pub(crate) fn in_file(self, index: usize) -> usize {
        match self {
            FileOrder::Interleaved { head_dim } => {
                let (head, row) = (index / head_dim, index % head_dim);
                let (half, pair) = (row / (head_dim / 2), row % (head_dim / 2));
                head * head_dim + 2 * pair + half
            }
            FileOrder::Tiled {
                first,
                key_heads,
                group,
                dim,
            } if index >= first => {
                let (head, value) = ((index - first) / dim, (index - first) % dim);
                let (key_head, member) = (head / group, head % group);
                first + (member * key_heads + key_head) * dim + value
            }
            FileOrder::Same | FileOrder::Tiled { .. } => index,
        }
    }

    /// Returns which row or column of the matrix is number `index` of the file.
    pub(crate) fn in_matrix(self, index: usize) -> usize {
        match self {
            FileOrder::Interleaved { head_dim } => {
                let (head, row) = (index / head_dim, index % head_dim);
                head * head_dim + row % 2 * (head_dim / 2) + row / 2
            }
            // Heads in tiles are those of a matrix whose key heads and members change places.
            FileOrder::Tiled {
                first,
                key_heads,
                group,
                dim,
            } => FileOrder::Tiled {
                first,
                key_heads: group,
                group: key_heads,
                dim,
            }
            .in_file(index),
            FileOrder::Same => index,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::FileOrder;

    #[test]
    fn rows_of_the_file_and_of_the_matrix_find_each_other() {
        let tiled = FileOrder::Tiled {
            first: 2,
            key_heads: 2,
            group: 3,
            dim: 2,
        };
        let in_file: Vec<usize> = (0..14).map(|index| tiled.in_file(index)).collect();
        // The heads of key head 0 are numbers 0, 2 and 4 of the file.
        let expected = [0, 1, 2, 3, 6, 7, 10, 11, 4, 5, 8, 9, 12, 13];
        assert_eq!(in_file, expected);
        let interleaved = FileOrder::Interleaved { head_dim: 8 };
        for order in [tiled, interleaved, FileOrder::Same] {
            for index in 0..14 {
                assert_eq!(order.in_matrix(order.in_file(index)), index, "{order:?}");
            }
        }
    }
}
