// The ways of decoding of a model. A name of the model may end with one of them.

export const DECODING = {
  autoregressive: 'One token after the other',
  diffusion: 'Block diffusion: several tokens at once',
};

/** Returns the names of `ids` that end with no way of decoding of another name. */
export function ownNames(ids) {
  return ids.filter(id => ownName(id, ids) === id);
}

/** Returns the name in `ids` of the model that `id` chooses a way of decoding of, or `id`. */
export function ownName(id, ids) {
  const name = id.slice(0, id.lastIndexOf(':'));
  return ids.includes(name) && otherWay(name, ids) === id.slice(name.length + 1) ? name : id;
}

/** Returns the way of decoding that the model `name` has beside its default, or null. */
export function otherWay(name, ids) {
  return Object.keys(DECODING).find(way => ids.includes(`${name}:${way}`)) ?? null;
}
