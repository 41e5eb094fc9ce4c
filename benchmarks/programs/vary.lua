-- Each request differs from the one before, as those of many clients behind one connection do.
local requests, at = {}, 0

function init(args)
   for number = 1, 997 do
      requests[number] = wrk.format("GET", wrk.path .. "?n=" .. number)
   end
end

function request()
   at = at % 997 + 1
   return requests[at]
end
