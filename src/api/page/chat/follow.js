// Keeps the end of a growing text in view, but only while the reader is at the end.

const NEAR_PX = 48;

/**
 * Makes `scroller` follow the end of `content` while `isChat` returns true. `button` appears when
 * the reader has left the end.
 */
export function followEnd({ scroller, content, button, isChat }) {
  let isFollowing = true;
  let lastTop = 0;
  const isAtEnd = () =>
    scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;

  function toEnd() {
    isFollowing = true;
    scroller.scrollTop = scroller.scrollHeight;
    button.hidden = true;
  }

  function keepUp() {
    if (!isChat()) button.hidden = true;
    else if (isFollowing) toEnd();
    else button.hidden = isAtEnd();
  }

  scroller.addEventListener(
    'scroll',
    () => {
      const top = scroller.scrollTop;
      if (isAtEnd()) isFollowing = true;
      // The view moves up only when the reader moves it; growing text leaves it where it is.
      else if (top < lastTop) isFollowing = false;
      lastTop = top;
      button.hidden = !isChat() || isFollowing || isAtEnd();
    },
    { passive: true },
  );
  // A reader may begin to scroll while the text grows faster than they scroll.
  scroller.addEventListener(
    'wheel',
    event => {
      if (event.deltaY < 0) isFollowing = false;
    },
    { passive: true },
  );
  button.addEventListener('click', toEnd);
  const watcher = new ResizeObserver(keepUp);
  watcher.observe(content);
  watcher.observe(scroller);
  return { toEnd };
}
